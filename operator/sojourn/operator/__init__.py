"""The operator that turns Sojourn's custom resources into Helm releases."""
