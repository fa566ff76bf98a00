# SPDX-License-Identifier: Apache-2.0
"""Writes files atomically, reads files of the user, and reads facts about models from their folders.

No module of this package imports torch.
"""
