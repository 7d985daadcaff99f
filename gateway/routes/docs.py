"""The schema of all routes as pages. Their addresses are relative: a proxy may serve us below a
path of its own. What draws them comes from a public CDN; where a browser cannot reach that, the
page says so and leads to the schema itself."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

SCHEMA = "openapi.json"
UNREACHABLE = f"""<script>
addEventListener("load", () => {{
  if (window.SwaggerUIBundle || window.Redoc) return;
  const note = document.createElement("p");
  note.append("This page is drawn by a script from the internet, which cannot be reached. ");
  const link = document.createElement("a");
  link.href = "{SCHEMA}";
  link.append("The schema itself is here.");
  note.append(link);
  document.body.append(note);
}});
</script>
"""


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    return _explained(get_swagger_ui_html(openapi_url=SCHEMA, title=request.app.title))


@router.get("/redoc")
async def redoc(request: Request) -> HTMLResponse:
    return _explained(get_redoc_html(openapi_url=SCHEMA, title=request.app.title))


def _explained(page: HTMLResponse) -> HTMLResponse:
    return HTMLResponse(bytes(page.body).decode().replace("</head>", f"{UNREACHABLE}</head>", 1))
