module github.com/pgratelimit/ratelimit/integration

go 1.26.0

require (
	github.com/pgratelimit/ratelimit v0.0.0
	pgregory.net/rapid v1.3.0
)

replace github.com/pgratelimit/ratelimit => ../
