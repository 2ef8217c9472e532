package frameworks

import (
	"net/http"
	"time"

	"github.com/labstack/echo/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
)

var (
	perRoute     = ratelimit.TokenBucket{Name: "per_route", Rate: 100, Period: time.Minute}
	failedLogins = ratelimit.TokenBucket{Name: "failed_logins", Rate: 1, Period: 10 * time.Minute, Capacity: 2}
)

// Echo wraps a Middleware's Handler by echo.WrapMiddleware, which gives requests the pattern of
// their route, so that httplimit.ByRoute(nil) is a key. echo turns the errors that
// handlers return into answers only after all middlewares; answerErrors does that
// within the limits, so that they know the status by which they count.
func Echo(store httplimit.Store) (http.Handler, error) {
	addresses, err := httplimit.NewAddresses(nil) // no proxy: believe no header
	if err != nil {
		return nil, err
	}
	all, err := httplimit.New(store, &httplimit.Config{Policies: []httplimit.Policy{
		{Limit: perRoute, Key: httplimit.Join(httplimit.ByRoute(nil), addresses.Key)},
	}})
	if err != nil {
		return nil, err
	}
	logins, err := httplimit.New(store, &httplimit.Config{
		Policies: []httplimit.Policy{{Limit: failedLogins, Key: addresses.Key, Counts: httplimit.CountOnly(http.StatusUnauthorized)}},
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
