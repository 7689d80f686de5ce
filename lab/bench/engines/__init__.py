"""Other inference engines as peers: vLLM, OpenVINO GenAI and llama.cpp.

Each arm is a process of its own (`worker`), by an interpreter that has the engine. `choice` names
engines, their options and arms, `environment` looks into an interpreter, `model_file` and
`gguf_file` give the model the engine's format, `process` talks to a worker, and `arm` joins them.
"""
