"""OpenAI's Responses API: request and response bodies of `/v1/responses`, stored responses."""
