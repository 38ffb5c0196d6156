"""The same scenes on an event clock: a swarm of counts (``simulate``), or of real gradients (``virtual_time``)."""
