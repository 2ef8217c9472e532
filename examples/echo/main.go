// Echo has limits behind the router of labstack/echo:
//
//	go run ./examples/echo
//
// echo.WrapMiddleware takes a Middleware's Handler, and gives requests the pattern of
// their route, so that httplimit.ByRoute(nil) is a key. echo turns the errors that
// handlers return into answers only after all middlewares; answerErrors does that
// within the limits, so that they know the status by which they count.
package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"time"

	"github.com/labstack/echo/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

var (
	PerRoute     = ratelimit.TokenBucket{Name: "per_route", Rate: 100, Period: time.Minute}
	FailedLogins = ratelimit.TokenBucket{Name: "failed_logins", Rate: 1, Period: 10 * time.Minute, Capacity: 2}
)

// routes returns the service; in production the store is pgstore's.
func routes(store httplimit.Store) (http.Handler, error) {
	addresses, err := httplimit.NewAddresses(nil) // no proxy: believe no header
	if err != nil {
		return nil, err
	}
	all, err := httplimit.New(store, &httplimit.Config{Policies: []httplimit.Policy{
		{Limit: PerRoute, Key: httplimit.Join(httplimit.ByRoute(nil), addresses.Key)},
	}})
	if err != nil {
		return nil, err
	}
	logins, err := httplimit.New(store, &httplimit.Config{
		Policies: []httplimit.Policy{{Limit: FailedLogins, Key: addresses.Key, Counts: httplimit.CountOnly(http.StatusUnauthorized)}},
		Fields:   httplimit.NoFields,
	})
	if err != nil {
		return nil, err
	}
	e := echo.New()
	e.Use(echo.WrapMiddleware(all.Handler))
	e.GET("/reports/:id", func(c *echo.Context) error { return c.String(http.StatusOK, "report "+c.Param("id")) })
	e.POST("/login", logIn, echo.WrapMiddleware(logins.Handler), answerErrors)
	return e, nil
}

func logIn(c *echo.Context) error {
	if c.QueryParam("password") != "correct horse battery staple" {
		return echo.ErrUnauthorized
	}
	return c.NoContent(http.StatusNoContent)
}

// answerErrors answers the errors of next, within the middlewares around it.
func answerErrors(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c *echo.Context) error {
		if err := next(c); err != nil {
			c.Echo().HTTPErrorHandler(c, err)
		}
		return nil
	}
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "echo:", err)
		os.Exit(1)
	}
}

// run asks for reports and logs in, and checks the answers.
func run() error {
	h, err := routes(memstore.New(nil))
	if err != nil {
		return err
	}
	const right = "/login?password=correct+horse+battery+staple"
	for _, step := range []struct {
		method, path string
		want         int
	}{
		{"GET", "/reports/1", 200},
		{"POST", "/login?password=a", 401},
		{"POST", right, 204},
		{"POST", "/login?password=b", 401},
		{"POST", right, 429},
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(step.method, step.path, nil))
		fmt.Println(step.method, step.path, w.Code, w.Header().Values("RateLimit"))
		if w.Code != step.want {
			return fmt.Errorf("%s: got %d, want %d", step.path, w.Code, step.want)
		}
	}
	return nil
}
