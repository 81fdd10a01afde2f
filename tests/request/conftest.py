from hypothesis import settings

# A busy machine is slow, not wrong.
settings.register_profile("request", deadline=None)
settings.load_profile("request")
