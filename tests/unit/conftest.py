"""Settings of all quick tests."""

from hypothesis import HealthCheck, settings

# No timed assertions: machines that run tests are busy with other things.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
