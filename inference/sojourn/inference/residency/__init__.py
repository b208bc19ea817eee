"""Where the weights are, as this process knows it: a report in four buckets, and the component map for residencyd."""
