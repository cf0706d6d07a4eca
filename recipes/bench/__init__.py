"""The common frame of the benchmarks: what every ``recipes/bench_*.py`` shares.

A recipe lists `scenario.Scenario`s and hands them to `benchmark.run`. The frame does the rest, so that all figures are
made alike: `options` is the common command line, `measurement` interleaves the systems, `record` forms medians and
ranges, `machine` says where it ran, `results` writes the JSON, `table` and `picture` show it. `child` is a process of
its own for what a runner must not share with the rest.
"""
