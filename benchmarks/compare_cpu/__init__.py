"""One checkpoint on a CPU with paxkv, llama.cpp and vLLM; see `__main__.py`."""
