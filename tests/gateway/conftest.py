"""What listeners count comes back to zero."""

from tests.support.counted import nothing_stays_counted as nothing_stays_counted
