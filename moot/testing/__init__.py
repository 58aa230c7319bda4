"""Public fakes that speak the real wire, so that code on top of Moot is tested against servers and not against mocks.

`ScriptedVerifier` and `ScriptedDrafter` are gRPC servers on loopback whose tokens are a pure function of the prefix
(`ScriptedText`) and which fail as they are told; `TcpProxy` breaks the network between two ends; `byte_tokenizer` needs
no file; `InProcessServer` serves any servicer; `moot.testing.made_certificates` makes what mutual TLS needs. No torch,
no cluster.
"""

from moot.testing.byte_tokenizer import END_TOKEN_ID, byte_tokenizer
from moot.testing.in_process_server import InProcessServer
from moot.testing.proxy import TcpProxy
from moot.testing.scripted_drafter import Manner, ScriptedDrafter
from moot.testing.scripted_sessions import scripted_logprobs
from moot.testing.scripted_text import ScriptedText
from moot.testing.scripted_verifier import ScriptedVerifier

__all__ = [
    "END_TOKEN_ID",
    "InProcessServer",
    "Manner",
    "ScriptedDrafter",
    "ScriptedText",
    "ScriptedVerifier",
    "TcpProxy",
    "byte_tokenizer",
    "scripted_logprobs",
]
