"""`make e2e`: from a checkout to tests on pods that run, in one command, and nothing left behind."""
