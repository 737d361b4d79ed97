"""Tests of `v026/` run in the engine's own environment (make test-vllm); elsewhere they are not collected, for there is nothing to test."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("vllm") else ["v026"]
