# SPDX-License-Identifier: Apache-2.0
"""Saves what engines and drivers learn during a run, so that a later start of the run can begin with it.

They learn acceptance rates, times of engine steps and decode speeds, for example. These are saved as numbers in JSON files.
"""
