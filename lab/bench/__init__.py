"""Measurements that anyone can rerun: each prints a Markdown table and writes JSON under `lab/bench/results/`."""
