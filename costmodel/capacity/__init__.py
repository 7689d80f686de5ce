"""Capacity planning: memory, throughput and latency of a server, from measured operators."""
