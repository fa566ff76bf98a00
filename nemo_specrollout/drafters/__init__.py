# SPDX-License-Identifier: Apache-2.0
"""Text drafters (`text.py`), and the draft board that compares the proposals of all drafters (`board.py`).

In this package a step is an engine step, which is one forward pass of an engine with drafting, verification and sampling.
"""
