# SPDX-License-Identifier: Apache-2.0
"""Text drafters (`text.py`), and the draft board that compares the proposals of all drafters (`board.py`)."""
