"""The HTTP front of the router: OpenAI's API over the rounds."""

from services.router.http.app import create_app
from services.router.http.server import serve_http
from services.router.settings import FrontState, HttpSettings, StaticFrontState

__all__ = ["FrontState", "HttpSettings", "StaticFrontState", "create_app", "serve_http"]
