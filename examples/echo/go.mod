module github.com/pgratelimit/ratelimit/examples/echo

go 1.26.0

require (
	github.com/labstack/echo/v5 v5.3.1
	github.com/pgratelimit/ratelimit v0.0.0-00010101000000-000000000000
	github.com/pgratelimit/ratelimit/httplimit v0.0.0-00010101000000-000000000000
)

require github.com/dunglas/httpsfv v1.1.2 // indirect

replace (
	github.com/pgratelimit/ratelimit => ../../
	github.com/pgratelimit/ratelimit/httplimit => ../../httplimit
)
