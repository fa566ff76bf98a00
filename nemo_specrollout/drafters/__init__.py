# SPDX-License-Identifier: Apache-2.0
"""Drafters that read text (`text.py`), and the board on which the proposals of all drafters meet (`board.py`)."""
