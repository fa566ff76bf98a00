# SPDX-License-Identifier: Apache-2.0
"""What differs by version of vLLM, in one class for each family of its V2 model runners, behind one interface."""
