"""The KV cache of agents, stored as strata: 2-bit planes, as many a page as it deserves."""

__version__ = "0.1.0"
