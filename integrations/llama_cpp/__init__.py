"""llama.cpp: its files of forward times."""
