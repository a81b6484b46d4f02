"""`prepare` on many machines, by Ray, which is imported only when it is asked for (``stratarec[ray]``)."""
