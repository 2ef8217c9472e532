// Package browser holds a test of the page that package console serves, in a real browser.
package browser
