"""Evaluation: models, traces, metrics, peers and the report."""
