# SPDX-License-Identifier: Apache-2.0
"""Writes files atomically, reads files safely, and reads facts from the folders of models. Imports no torch."""
