"""The Grafana dashboards of charts/sojourn/dashboards, built from Python.

`python -m tools.dashboards` writes them, `--check` tells whether they are up to date. One board a file; `parts` has the
panels that they are made of, `lint` what must hold for every board. Never paste an export of Grafana back into the
chart: Grafana 13 exports another format, which provisioning refuses.
"""
