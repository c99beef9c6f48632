"""The pure core: decisions without clocks, sockets, threads, environment or torch.

Reading order (the flow of the three papers): ``slicing`` (P3) -> ``topology`` -> ``treegen`` -> ``plan`` (Blink) ->
``exchange`` -> ``gates`` (P3 across the step) -> ``commit`` (ADSP).
"""
