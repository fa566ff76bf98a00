# SPDX-License-Identifier: Apache-2.0
"""Whether this package can work where it is: versions, patch points, device, an engine that is tried; without torch."""
