"""ADSP: when a worker commits, how the server takes a commit in, and how the commit rate is found.

Reading order (the flow): ``policy`` (when) -> ``worker`` (one worker's commits) -> ``server`` and ``update`` (W += U/M,
exactly once) -> ``scheduler`` and ``search`` (equal counts, which rate) -> ``curve`` (the reward) -> ``catalog`` (a
policy's name to all of its parts).  ``theory`` holds formulas that stand by themselves.

Source: "Distributed Machine Learning through Heterogeneous Edge Systems" (Hu, Wang, Wu; AAAI 2020).
"""
