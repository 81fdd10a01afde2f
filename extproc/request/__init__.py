"""From a request's path, headers and body to :class:`~extproc.request.profile.RequestProfile`."""
