"""The adaptive tree decoder: targets, drafters, policies, acceptance and the decode loop.

`decoder.engine.TreeDecoder` is its public class, which `rooftree` re-exports. Imports costmodel,
torch and transformers.
"""
