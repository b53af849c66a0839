"""One file an operation: its cases, inputs, ours, peers and check, as a `benchmarks.suite.Suite`."""
