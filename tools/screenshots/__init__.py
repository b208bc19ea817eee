"""The pictures of the README, made from the running demo model.

`python -m tools.screenshots` serves the shipped model, lets a real Prometheus scrape it and residencyd while requests
run, then has headless Chromium draw the Residency dashboard with Grafana's own components (`board.jsx`, `shoot.mjs`),
dark and light, and rich draw `residencyd top`.
"""
