package console_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"

	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/console"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// The page in a program's own server, behind its authentication.
func Example() {
	pool, done := pgtest.Example("")
	defer done()
	store, err := pgstore.New(pool, nil)
	if err != nil {
		panic(err)
	}
	limits, err := catalog.NewInMemory(nil) // or catalog.New(pool, nil)
	if err != nil {
		panic(err)
	}

	page, err := console.New(&console.Config{
		Pool: pool, Store: store, Catalog: limits, Prefix: "/limits", Hosts: []string{"example.com"},
	})
	if err != nil {
		panic(err)
	}
	mux := http.NewServeMux()
	mux.Handle("/limits/", page)

	w := httptest.NewRecorder()
	mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/limits/", nil))
	fmt.Println(w.Code, w.Header().Get("Content-Type"))
	// Output: 200 text/html; charset=utf-8
}
