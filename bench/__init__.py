"""Measurements that anyone can rerun. Each script prints a Markdown table and writes JSON under `bench/results/`."""
