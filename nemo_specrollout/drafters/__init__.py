# SPDX-License-Identifier: Apache-2.0
"""The text drafters of an engine (`text.py`), and the draft board that compares the proposals of all drafters (`board.py`)."""
