# SPDX-License-Identifier: Apache-2.0
"""Decodes requests of coming steps in free slots of engines, and lets each sample come from one policy version."""
