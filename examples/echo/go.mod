module github.com/pgratelimit/ratelimit/examples/echo

go 1.26.0

require (
	github.com/labstack/echo/v5 v5.3.1
	github.com/pgratelimit/ratelimit v0.0.0
	github.com/pgratelimit/ratelimit/httplimit v0.0.0
)

require github.com/dunglas/httpsfv v1.1.2 // indirect
