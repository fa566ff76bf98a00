# SPDX-License-Identifier: Apache-2.0
"""Files: written as a whole, read with care, and the facts in the folder of a model. No torch."""
