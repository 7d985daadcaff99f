"""Layers: functions of tensors that know no session, no wire and no file.

Letters in shapes: B rows of a batch, N new tokens of a row, T positions of a cache, S positions
that are looked at (the span), D hidden width, H query heads, K key/value heads, d width of one
head, V vocabulary, F feature frames.
"""
