"""Programs for the people who develop Sojourn; none of them is installed."""
