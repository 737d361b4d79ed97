"""Other ways to hold a KV cache, each run through its own code and counted by what it really holds (docs/peers.md)."""
