# SPDX-License-Identifier: Apache-2.0
"""Checks whether this package can work on this machine, by versions, patch points, device and a trial engine.

Only child processes load torch.
"""
