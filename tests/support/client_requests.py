# SPDX-License-Identifier: Apache-2.0
"""Requests of coding agents: every field as they were seen to send it, the texts and tools replaced by short ones."""

from __future__ import annotations

from typing import Any

_ID = "01a23131-6aec-74a3-b851-856e56c773c2"
_PARAMETERS = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}

CODEX: dict[str, Any] = {  # Codex 0.171.0
    "model": "tiny", "stream": True, "store": False, "tool_choice": "auto", "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "prompt_cache_key": _ID,
    "client_metadata": {"session_id": _ID, "x-codex-turn-metadata": '{"request_kind":"turn"}'},
    "tools": [
        {"type": "function", "name": "exec_command", "description": "Runs a command.", "strict": False,
         "parameters": _PARAMETERS},
        {"type": "namespace", "name": "agents", "description": "Others.", "tools": [
            {"type": "function", "name": "spawn", "description": "Starts one.", "strict": False,
             "parameters": _PARAMETERS}]},
        {"type": "web_search", "external_web_access": False},
    ],
    "input": [
        {"type": "message", "id": f"msg_{_ID}", "role": "developer",
         "content": [{"type": "input_text", "text": "You write code."}]},
        {"type": "message", "id": f"msg_{_ID}", "role": "developer",
         "content": [{"type": "input_text", "text": "<skills>\nnone\n</skills>"}]},
        {"type": "message", "id": f"msg_{_ID}", "role": "user",
         "content": [{"type": "input_text", "text": "<environment_context>\n  <cwd>/p</cwd>\n</environment_context>"}]},
        {"type": "message", "id": f"msg_{_ID}", "role": "user",
         "content": [{"type": "input_text", "text": "Say hello"}]},
    ],
}  # fmt: skip

CLAUDE_CODE: dict[str, Any] = {  # Claude Code 2.1.197
    "model": "tiny", "max_tokens": 32000, "stream": True, "thinking": {"type": "adaptive"},
    "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You write code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "\nBe careful.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [
        {"name": "Bash", "description": "Runs a command.", "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema", **_PARAMETERS, "additionalProperties": False}},
    ],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>\nIt is Tuesday.\n</system-reminder>\n"},
            {"type": "text", "text": "Say hello", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "Agents: none."},
    ],
}  # fmt: skip
