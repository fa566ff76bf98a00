# SPDX-License-Identifier: Apache-2.0
"""Sets the learning rate of the next refresh by the results of earlier refreshes. Pure."""

STEP = 3.0
LEAST_SHARE = 1e-3


class RefreshRate:
    """Owns the share of the usual learning rate that refreshes take.

    A head that has converged gets worse at a rate that suits an unfinished head, and no few steps mend it. A candidate
    that is worse than the head in service lowers the share by `STEP`. A published one raises it by the root of that, up to 1.
    Example: train at `usual * rate.share`, then `rate.judged(difference, published)`.
    """

    def __init__(self) -> None:
        self.share = 1.0

    def judged(self, difference: float, published: bool) -> None:
        """Adjusts the share after a candidate was judged.

        `difference`: held-out acceptance length of the candidate minus the head in service's. NaN, where it was not
        measured, changes nothing.
        """
        if published:
            self.share = min(1.0, self.share * STEP**0.5)
        elif difference < 0.0:
            self.share = max(LEAST_SHARE, self.share / STEP)
