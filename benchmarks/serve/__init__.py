"""Load on an OpenAI-compatible server over HTTP, and the latencies that its clients measure."""
