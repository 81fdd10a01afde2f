"""Request body to :class:`~extproc.request.profile.RequestProfile`."""
