"""LLMServingSim: operator tables in the formats of its profilers."""
