# SPDX-License-Identifier: Apache-2.0
"""The check of the package on a machine with a GPU (`gpu_check`), and the items that it runs."""
